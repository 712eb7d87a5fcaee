"""All families of cases by name."""

from properties import dense_mla, serving, sparse_mla, sparse_prefill
from properties.case import Case
from properties.family import Family

FAMILIES: dict[str, Family] = {
    "sparse_mla": sparse_mla.FAMILY,
    "dense_mla": dense_mla.FAMILY,
    "sparse_prefill": sparse_prefill.FAMILY,
    "serving": serving.FAMILY,
    "serving_sparse": serving.SPARSE_FAMILY,
}

CASES: dict[str, type[Case]] = {name: family.case for name, family in FAMILIES.items()}
