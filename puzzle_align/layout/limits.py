"""How large numbers may be, for all who check them; no torch is needed to know it."""

# A float32 that is neither 0 nor subnormal is from so far from 0 to so far.
SMALLEST_FP32, LARGEST_FP32 = 1.1754943508222875e-38, 3.4028234663852886e38
MOST_INT32, MOST_INT64 = 2**31 - 1, 2**63 - 1
MOST_RANKS = 2**14  # of a job
