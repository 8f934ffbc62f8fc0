"""Stage ppo: responses are sampled, scored and learnt from, iteration by iteration.

``rollout`` says what all ranks know of an iteration's responses; ``score`` and ``learn`` run models
over them; ``experience`` lies between: rewards and advantages, on each sample's owner.
"""
