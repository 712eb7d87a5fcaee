"""Cases of dense MLA: their config, their arrays, the strategies that draw them and what a failure says."""

from properties.dense_mla.case import DenseCase
from properties.dense_mla.judging import expect, explain
from properties.dense_mla.strategies import MENU, SERVING_MENU, blank, cases, configs
from properties.family import Family

FAMILY = Family(DenseCase, MENU, SERVING_MENU, configs, cases, blank, expect, explain)
