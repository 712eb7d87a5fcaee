"""Cases of serving: steps of a small engine over one paged pool, as a rule-based state machine draws them."""

from properties.family import Family
from properties.serving.case import ServingCase, SparseServingCase
from properties.serving.judging import expect, explain
from properties.serving.simpler import simpler
from properties.serving.strategies import MENU, SPARSE_MENU, blank, cases, configs, sparse_blank, sparse_configs

FAMILY = Family(ServingCase, MENU, (), configs, cases, blank, expect, explain, simpler)

SPARSE_FAMILY = Family(
    SparseServingCase, SPARSE_MENU, (), sparse_configs, cases, sparse_blank, expect, explain, simpler
)
