"""The mechanism: compute one noisy average from the deltas of a cohort.

The modules in the order of a round:

    plan            the parameters of Algorithm 1; a combination without a proof of privacy raises an error
    sampling        which users take part in a round, and the privacy event of drawing them
    clipping        the bound on the update of one user
    aggregation     clipped deltas as integers, their exact sum, and an average with a bounded sensitivity
    noise           Gaussian noise on the average, which makes a private value public
      exact_normal    exact samples of a Gaussian that is rounded to integers
      correlated      noise that partly cancels the noise of earlier rounds
      noise_kernels   exact samples, and the weighted sum of earlier correlated noise, in Triton, for GPUs
    kernels         the sum of clipped deltas in Triton, for GPUs
"""
