"""The mechanism: the deltas of many users in, one noisy average out.

The modules in the order of a round:

    plan            the parameters of Algorithm 1, checked together; the combinations without a proof are refused here
    sampling        which users take part, and what drawing them so costs
    clipping        how far one user may move the model
    aggregation     clipped deltas to integers, their exact sum, and an average with a bounded sensitivity
    noise           Gaussian noise on the average: what was private becomes public
      exact_normal    normals that are rounded exactly
      correlated      noise that partly cancels that of earlier rounds
    kernels         the sum and the past of correlated noise in Triton, for GPUs
"""
