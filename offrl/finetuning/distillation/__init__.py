"""`offrl finetune mode=distill`: students that see less than their teachers learn in the environment what those would
do there.
"""
