import torch


def test_share(no_leaks, provider, serve, connect):
    """x"""

    @provider.share(managed=True)
    def load(n: int):
        return torch.nn.Linear(n, n)

    serve()
    c = connect()
    with c.call("load", 3) as h:
        own = provider.call("load", n=3)
        own.value.weight.data.fill_(2)
        assert h.value.weight.sum().item() == 18
        own.release()
    assert c.get_server_info()["objects"] == 1
