"""Peak memory, of the process and of devices."""

from moejax.bench.memory import peak_memory


def test_peak_memory_never_falls_and_is_in_bytes():
    before = peak_memory()
    assert before["process_peak_bytes"] > 10 * 2**20
    assert before["device_peak_bytes"] is None  # the CPU backend does not count
    assert peak_memory()["process_peak_bytes"] >= before["process_peak_bytes"]


class CountingDevice:
    def memory_stats(self):
        return {"peak_bytes_in_use": 7}


def test_device_peak_is_the_largest_devices():
    assert peak_memory([CountingDevice(), CountingDevice()])["device_peak_bytes"] == 7
