"""Bugs that the tests must catch."""

from mutations.clustered import CLUSTERED
from mutations.experts import EXPERTS
from mutations.hopper import EXECUTED, HOPPER
from mutations.mutation import ROOT as ROOT
from mutations.mutation import Mutation as Mutation
from mutations.portable import KERNELS
from mutations.python import PYTHON
from mutations.ranks import RANKS
from mutations.selection import SELECTION
from mutations.streamed import STREAMED

MUTATIONS = [
    *(mutation._replace(interpreted=True) for mutation in (*KERNELS, *SELECTION)),
    *PYTHON,
    *RANKS,
    *EXECUTED,
    *STREAMED,
    *CLUSTERED,
    *EXPERTS,
    *(mutation._replace(gpu=True) for mutation in HOPPER),
]
