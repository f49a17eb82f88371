"""pfl's side of against_pfl.py: the paper's user update, written for Apple's pfl and run in an environment with pfl.

The input is a file with initial parameters and users' windows, then one request per line on standard input. The output
is one line of JSON per request. This program does not import Unheard. Everything that is timed is pfl's own code: its
loop over users, its local SGD, its clip, its Gaussian noise and its server step. If there are several processes, each
is one of pfl's workers, and they sum over gloo.
"""

import json
import os
import resource
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch.nn import functional

GATES = ("input", "forget", "cell", "output")
"""The gates in the order of torch.nn.LSTM, which is also the order of Unheard."""


class TiedLSTM(torch.nn.Module):
    """The paper's model with torch's fused LSTM. Word vectors of norm 1 serve as input and output embedding.

    torch's LSTM has two biases per gate; the second stays 0 and is not trained, because the paper's model has one.

    Args:
        params: The layers of Unheard's model by name.
    """

    def __init__(self, params: dict[str, np.ndarray]) -> None:
        super().__init__()
        layers = {name: torch.from_numpy(value.copy()) for name, value in params.items()}
        D, H = layers["embedding"].shape[1], layers["projection_weight"].shape[0]
        weight_YG = torch.cat([layers[f"{gate}_weight"] for gate in GATES], dim=1)
        self.embedding = torch.nn.Parameter(layers["embedding"])
        self.lstm = torch.nn.LSTM(D, H, batch_first=True)
        self.projection = torch.nn.Linear(H, D)
        with torch.no_grad():
            self.lstm.weight_ih_l0.copy_(weight_YG[:D].T)
            self.lstm.weight_hh_l0.copy_(weight_YG[D:].T)
            self.lstm.bias_ih_l0.copy_(torch.cat([layers[f"{gate}_bias"] for gate in GATES]))
            self.lstm.bias_hh_l0.zero_()
            self.projection.weight.copy_(layers["projection_weight"].T)
            self.projection.bias.copy_(layers["projection_bias"])
        self.lstm.bias_hh_l0.requires_grad_(False)

    def loss(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        words_VD = functional.normalize(self.embedding, dim=1)
        states_BTH, _ = self.lstm(functional.embedding(inputs_BT, words_VD))
        logits_BTV = functional.linear(self.projection(states_BTH), words_VD)
        # A target of -1 marks a position that is not predicted. The mean is over the other positions.
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-1)

    def metrics(self, *_: torch.Tensor) -> dict[str, float]:
        """Return no metrics. pfl requires this method; it calls it in its first round, which is not timed."""
        return {}

    def in_unheards_order(self, named: dict[str, torch.Tensor]) -> np.ndarray:
        """Return named tensors of this module as one flat vector in the order of Unheard's layout."""
        weight_YG = torch.cat([named["lstm.weight_ih_l0"].T, named["lstm.weight_hh_l0"].T])
        flat = [named["embedding"].flatten()]
        for weight, bias in zip(weight_YG.chunk(4, dim=1), named["lstm.bias_ih_l0"].chunk(4), strict=True):
            flat += [weight.flatten(), bias]
        flat += [named["projection.weight"].T.flatten(), named["projection.bias"]]
        return torch.cat(flat).detach().numpy()


class Federation:
    """A federation of pfl's own components, combined as in pfl's tutorials.

    Args:
        given: The arrays of the input file: windows of users, and initial parameters.
        learning_rate: Local learning rate.
        batch_size: Windows in a local batch.
        clip_norm: S.
        noise_multiplier: z.
    """

    def __init__(
        self,
        given: dict[str, np.ndarray],
        learning_rate: float,
        batch_size: int,
        clip_norm: float,
        noise_multiplier: float,
    ) -> None:
        inputs_UKT, targets_UKT = (torch.from_numpy(given.pop(name)) for name in ("inputs_UKT", "targets_UKT"))
        self.users = [PyTorchTensorDataset(windows) for windows in zip(inputs_UKT, targets_UKT, strict=True)]
        self.module = TiedLSTM(given)
        self.model = PyTorchModel(
            self.module,
            torch.optim.SGD,
            torch.optim.SGD([p for p in self.module.parameters() if p.requires_grad], lr=1.0),
        )
        self.train_params = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=learning_rate, local_batch_size=batch_size
        )
        mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(clip_norm, noise_multiplier))
        self.backend = SimulatedBackend(self.dataset(), self.dataset(), postprocessors=[mechanism])
        self.algorithm, self.rounds_done = FederatedAveraging(), 0

    def dataset(self) -> FederatedDataset:
        """Return the users as a dataset of pfl."""
        np.random.seed(0)  # pfl distributes users over workers by this seed, so all workers must have the same
        sampler = get_user_sampler("minimize_reuse", list(range(len(self.users))))
        return FederatedDataset(lambda user: self.users[user], sampler)

    def round(self, num_users: int) -> None:
        """Run one round with a cohort of `num_users` users."""
        self.rounds_done += 1
        params = NNAlgorithmParams(
            central_num_iterations=self.rounds_done,
            evaluation_frequency=10**9,
            train_cohort_size=num_users,
            val_cohort_size=None,
        )
        self.algorithm.run(params, self.backend, self.model, self.train_params, send_metrics_to_platform=False)

    def one_delta(self) -> np.ndarray:
        """Return the update of the first user without clip and noise."""
        from pfl.internal.bridge import FrameworkBridgeFactory

        before = self.model.get_parameters()
        FrameworkBridgeFactory.sgd_bridge().do_sgd(self.model, self.users[0], self.train_params)
        change = self.model.get_model_difference(before)
        return self.module.in_unheards_order(dict(change.items()))


def processor_seconds() -> float:
    """Return the processor seconds of this process so far."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return mine.ru_utime + mine.ru_stime


def main() -> None:
    """Answer requests until standard input is closed."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other code may print to standard output; send it to standard error, not to the answers
    federation = Federation(dict(np.load(asked["given"])), **asked["update"])
    start = federation.model.get_parameters()
    print(json.dumps({"torch": torch.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        federation.model.set_parameters(start)
        if "delta_to" in request:
            np.save(request["delta_to"], federation.one_delta())
            answer = {}
        else:
            began, processor = time.perf_counter(), processor_seconds()
            federation.round(request["users"])
            answer = {"seconds": time.perf_counter() - began, "processor": processor_seconds() - processor}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
