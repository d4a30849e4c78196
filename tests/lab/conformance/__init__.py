"""Megatron-LM's own unit tests on CPU ranks, without and with patches: ``make conformance``, and README.md.

pytest loads the plugin in a checkout of Megatron-LM, whose tests are a package ``tests``, too. There this
folder is the package ``conformance``: the plugin imports the modules beside it relatively.
"""
