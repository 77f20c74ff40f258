"""The example of Holt and Sievert (2021), "Training machine learning models faster with Dask", with Ebbflow.

A small regressor, Adadelta, and a batch that grows five-fold. The paper's delay of 60 epochs would never be reached in
its 10 epochs; here it is 4, so that the batch grows twice. Runs in this process; with a Client of Dask (uncomment the
line), on its workers.
"""

import torch
from sklearn.datasets import make_regression
from torch import nn, optim

from ebbflow.sklearn import EbbflowRegressor


class HiddenLayer(nn.Module):
    def __init__(self, features=4, hidden=2, out=1):
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.out = nn.Linear(hidden, out)

    def forward(self, x):
        return self.out(nn.functional.relu(self.hidden(x)))


def main():
    est = EbbflowRegressor(
        module=HiddenLayer,
        module__features=10,
        optimizer=optim.Adadelta,
        optimizer__weight_decay=1e-7,
        lr=1.0,
        max_epochs=10,
        random_state=0,
    )
    est.set_params(batch_size="geo", batch_size__delay="4ep", batch_size__factor=5, batch_size__initial=4)

    inputs, targets = make_regression(n_features=10, random_state=0)
    inputs = torch.from_numpy(inputs.astype("float32"))
    targets = torch.from_numpy(targets.astype("float32")).reshape(-1, 1)
    est.fit(inputs, targets)

    print("epoch  batch  updates     loss")
    for epoch in est.history:
        print(f"{epoch['epoch']:5}  {epoch['batch']:5}  {epoch['updates']:7}  {epoch['train_loss']:7.0f}")


if __name__ == "__main__":
    # from distributed import Client; client = Client()
    main()
