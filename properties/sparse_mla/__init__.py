"""Cases of sparse MLA: their config, their arrays, the strategies that draw them and what a failure says."""

from properties.family import Family
from properties.sparse_mla.case import SparseCase
from properties.sparse_mla.judging import expect, explain
from properties.sparse_mla.strategies import MENU, SERVING_MENU, blank, cases, configs

FAMILY = Family(SparseCase, MENU, SERVING_MENU, configs, cases, blank, expect, explain)
