"""Sharded training inside other frameworks, one module each, which imports the framework.

``shardd.torch.integrations.transformers``: a Trainer; ``accelerate``: an Accelerator;
``lightning``: a strategy. The manual is docs/recipes.md.
"""
