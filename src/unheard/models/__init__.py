"""Language models: parameters and tokens in, scores of the next word out.

model           the protocol of a model, and the loss of a batch
recurrent       the paper's model: `TiedLSTM`, and `TiedGRU`
module          any `torch.nn.Module`
hugging_face    a causal language model of Hugging Face, trained whole or through LoRA
  base            gets the folder of a public base model
  packed, packed_layers, packed_kernels   the same model on the tokens of many users at once
"""
