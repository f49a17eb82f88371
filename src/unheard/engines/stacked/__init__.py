"""The stacked engine: computes the local steps of many users at once for the paper's models.

The gradients are written out by hand instead of by autograd.

One local step of user k (UserUpdateFedAvg in Algorithm 1 of the paper) is

    theta = theta0 + delta_k
    delta_k <- Clip(delta_k - eta * gradient of l(theta; b))

Only delta_k differs between users, so a chunk of U users is a matrix delta [U, P] and one theta0 [P] per run. The
kernels compute the step layer by layer. They never store the logits, the dense gradients of the word tables, or theta
of the whole model.

| module | content |
| --- | --- |
| engine.py | `StackedEngine`: divides cohorts into chunks, fills their buffers with users' batches, sums the results |
| sizes.py | `Sizes` (shapes and offsets) and `Buffers` (the tensors of a chunk) |
| plain.py | the step in torch operations, one user at a time: for CPUs, and the reference of every kernel |
| kernels.py | the step as a sequence of Triton kernels, recorded as a CUDA graph |
| table_kernels.py | the word tables: softmax over all words, and the update of the table |
| cell_kernels.py | the LSTM or GRU cell, forward and backward |
| matrix_kernels.py | the matrices of the gates and of the projection: their values, their update, and the clip |
| kernel_parts.py | functions that the kernels share |
| cuda_kernels.py, cuda/ | the largest of these kernels in CUDA C++, for the paper's LSTM on Hopper GPUs |

Shape letters, in addition to those of unheard/parameters.py. A tensor's name ends in the letters of its shape:

    U  users in a chunk           N  = B * T, positions in a local batch, ordered by time: n = t * B + b
    R  runs in a chunk (in `Buffers`); rows of a gate's matrix, X + H + 1 (in `Sizes` and the kernels)
    S  local steps                B  sequences in a local batch     T  tokens in an unroll
    P  parameters                 M  layers (named vectors)         V  words
    D  embedding size             F  features about the user        X  = D + F, the input of the cell
    H  state size                 G  gates: 4 (LSTM), 3 (GRU)       W  words in one tile of a table (in plain.py)
    L  parameters between the two tables: gates and projection ("middle")

The equations, for one user and one local batch. `on_sphere` normalises rows if the model has `unit_norm`:

    E = on_sphere(table)                             [V, D]   word vectors; the output table is the same one if tied
    x_n = [E[token_n], features]                     [X]      read_inputs
    gates and state h_n from x_n and h_(n - B)       [H]      cell_forward, once per t
    o_n = h_n projection + bias                      [D]      project
    p_n = softmax over words of (E o_n)              [V]      attend: keeps only the sums over words of exp and exp * E
    dl/do_n = (sum over v of p_nv E_v - E[target_n]) / targets in the batch      project_back
    dl/dh_n, dl/dgates                               [H]      project_back, cell_backward, once per t
    dl/dx_n                                          [X]      input_gradients
    delta of the matrices -= eta * inputs^T dl/dgates         update_matrix
    delta of the table    -= eta * (p - 1 at the target)^T o  update_table; the part from dl/dx: update_read
    scale_m = min(1, S_m / norm of layer m)          [M]      clip_scale; the next step multiplies delta by it
"""
