"""Cases of sparse prefill, which writes rows and attends: config, arrays, strategies and what a failure says."""

from properties.family import Family
from properties.sparse_prefill.case import PrefillCase
from properties.sparse_prefill.judging import expect, explain
from properties.sparse_prefill.strategies import MENU, SERVING_MENU, blank, cases, configs

FAMILY = Family(PrefillCase, MENU, SERVING_MENU, configs, cases, blank, expect, explain)
