"""Language models as policies of text MDPs: tokens, models, decoding, and the base of the algorithms that learn
them.
"""
