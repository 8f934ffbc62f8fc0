"""Parts of stage ppo: iterations of sampling responses, scoring them and training on them.

``rollout`` has an iteration's responses and the rows they make; ``experience`` has rewards and
advantages, on each sample's owner; ``learning`` has the losses of actor and critic, and their
optimizer steps.
"""
