"""All families of cases by name."""

from properties import dense_mla, sparse_mla
from properties.case import Case
from properties.family import Family

FAMILIES: dict[str, Family] = {"sparse_mla": sparse_mla.FAMILY, "dense_mla": dense_mla.FAMILY}

CASES: dict[str, type[Case]] = {name: family.case for name, family in FAMILIES.items()}
