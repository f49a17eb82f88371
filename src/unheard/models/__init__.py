"""Language models. A model is a function from parameters and tokens to the scores of the next word.

model           the protocol of a model, and the loss of a batch
recurrent       the paper's model: `TiedLSTM`, and the variant `TiedGRU`
module          any `torch.nn.Module` as a language model
hugging_face    a Hugging Face causal language model, of which all parameters or only LoRA matrices are trained
  base            writes the folder of a public base model, from a package, a file or the Hugging Face hub
  packed, packed_layers, packed_kernels   compute the gradients of many users of a Hugging Face model at once
"""
