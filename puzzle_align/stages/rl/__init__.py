"""Parts of stage ppo, whose iterations sample responses, score them and train on them.

``rollout`` has the facts of an iteration's responses that all ranks know; ``experience`` has
rewards and advantages, on each sample's owner; ``losses`` has the losses of actor and critic.
"""
