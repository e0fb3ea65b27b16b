"""Operations: tensors in, tensors out. Each folder holds ``ref.py`` (torch, any device, any shape the engine uses).

Every op is row-invariant: a row gets the same bits whatever else is in the batch and wherever it sits in it. Two rules
make that so. Matrix products run over tiles of a fixed number of rows, padded with zeros, because a product's arithmetic
changes with its shape. Elementwise mathematics uses only + - * /, sqrt, exp and log1p, because the vector body and the
scalar tail of torch's sigmoid, silu and softplus give different bits.
"""
