"""The page of ``puzzle-align report``: what a run's folder holds, as one HTML file."""
