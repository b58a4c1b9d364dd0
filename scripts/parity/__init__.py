"""Update by update beside the authors' own code, from a checkout that the reader has fetched; no reference code is kept
here.
"""
