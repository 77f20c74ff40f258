"""Ebbflow inside of other people's training loops; each module needs the extra of its name
(accelerate: that of transformers).

    transformers    ElasticTrainer: the Trainer of transformers, on workers that come and go
    lightning       ElasticStrategy: the Trainer of Lightning
    accelerate      prepare: loops with accelerate
    ray             prepare: loops of Ray Train

The frameworks keep their loops, their LR schedulers, clipping, mixed precision, logging and checkpoints. A step of the
framework is a step of an `ebbflow.Session`, which says who takes part, which samples, and what the rate is multiplied
by.
"""
