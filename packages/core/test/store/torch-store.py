# A rank of torch that does on its TCPStore what the test says: one Python expression per line of standard input, in
# which `store` is the store; answers with one line each.
import datetime
import hashlib
import hmac
import os
import sys

from torch.distributed import TCPStore


def prove(store, token, scope):
    """The handshake of Rankwise's store, as packages/core/src/store/handshake.ts describes it."""

    def proof(side):
        text = f"rankwise store 1 {side} {scope}\n".encode()
        return hmac.new(token.encode(), text + session + hello + nonce, hashlib.sha256).digest()

    hello = os.urandom(32)
    store.set("rankwise/hello", hello)
    challenge = store.get("rankwise/challenge")
    session, nonce = challenge[:16], challenge[16:48]
    assert hmac.compare_digest(challenge[48:], proof("store"))
    store.set("rankwise/answer", proof("rank"))
    return True


port, is_master, use_libuv = int(sys.argv[1]), sys.argv[2] == "master", sys.argv[3] == "libuv"
timeout = datetime.timedelta(seconds=5)
store = TCPStore("127.0.0.1", port, None, is_master, timeout, wait_for_workers=False, use_libuv=use_libuv)
print(store.port, flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
