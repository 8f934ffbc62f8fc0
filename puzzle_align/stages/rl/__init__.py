"""Parts of stage ppo, whose iterations sample responses, score them and train on them.

``rollout`` has an iteration's responses and the rows they make; ``experience`` has rewards and
advantages, on each sample's owner; ``losses`` and ``updates`` have the losses of actor and critic,
and their optimizer steps.
"""
