"""The compiled model of the interconnect, under names that a type checker can see."""

from tpu_dist._backend import load

_native = load().mesh

Topology = _native.Topology
Placement = _native.Placement
legal_topologies = _native.legal_topologies
default_traffic = _native.default_traffic
