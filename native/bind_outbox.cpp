#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "outbox.hpp"
#include "staged_transport.hpp"

namespace tapchannel {

namespace {

nb::object verdict_or_none(const Verdict& verdict) {
  return verdict ? nb::cast(verdict) : nb::none();
}

struct PyOutbox {
  std::shared_ptr<OutboxCore> core;

  ~PyOutbox() {
    if (!core) return;
    {
      nb::gil_scoped_release open;  // close waits, bounded, for copies in flight
      core->close();
    }
    reap(*core, true);
  }

  // Lets go of sources whose copy is done; with the GIL. A torch tensor counts its in-place
  // changes: a count that moved before the copy was done means that the copy may have read the new
  // bytes.
  static void reap(OutboxCore& core, bool attempt) noexcept {
    for (const Retired& source : core.take_retired(attempt)) {
      auto* owner = static_cast<PyObject*>(source.owner);
      if (source.version >= 0 && version_of(owner) != source.version) core.modified(source);
      Py_DECREF(owner);
    }
  }

  static int64_t version_of(PyObject* tensor) noexcept {
    PyObject* version = PyObject_GetAttrString(tensor, "_version");
    int64_t count = version == nullptr ? -1 : PyLong_AsLongLong(version);
    Py_XDECREF(version);
    PyErr_Clear();
    return count;
  }
};

// The progress thread must not wait for the GIL. It asks the interpreter to run this at its next
// safe point.
int reap_later(void* weak) {
  std::unique_ptr<std::weak_ptr<OutboxCore>> held(static_cast<std::weak_ptr<OutboxCore>*>(weak));
  if (auto core = held->lock()) PyOutbox::reap(*core, true);
  return 0;
}

Wire over_arena(const Arena& arena) {
  if (arena.host)
    return {[host = arena.host](const ControlBlock&) -> std::unique_ptr<Transport> {
      return std::make_unique<ShmTransport>(host);
    }};
  if (!arena.device) throw std::invalid_argument("the memory was let go already");
  return {[device = arena.device](const ControlBlock& block) -> std::unique_ptr<Transport> {
    return cuda_ipc_transport(device, block);
  }};
}

// Registers both memories at once: where the driver refuses, the outbox can still ask for another
// transport.
Wire over_staging(const Arena& staging, const Arena& arrivals, std::optional<int> ordinal) {
  if (!staging.host || !arrivals.host)
    throw std::invalid_argument("staging memory and arrival words are host memory");
  if (!ordinal)
    return {[staging = staging.host,
             arrivals = arrivals.host](const ControlBlock&) -> std::unique_ptr<Transport> {
      return std::make_unique<StagedHostTransport>(staging, arrivals);
    }};
  nb::gil_scoped_release open;
  cuda::Device device(*ordinal);
  auto pinned = std::make_shared<PinnedMapping>(device, staging.host);
  auto words = std::make_shared<PinnedMapping>(device, arrivals.host);
  return {[pinned = std::move(pinned), words = std::move(words)](const ControlBlock&) {
    return staged_transport(pinned, words);
  }};
}

PyOutbox make(Wire& wire, Block& block, nb::list cells, uint64_t slot_bytes, bool drop_newest,
              size_t queue_limit, double timeout, double credit_wait, int socket) {
  std::vector<CellGeometry> geometry;
  for (nb::handle cell : cells) geometry.push_back(geometry_from(cell));
  if (!wire.make) throw std::invalid_argument("an outbox took this wire over already");
  auto transport = std::exchange(wire.make, nullptr)(block.block);
  auto core = std::make_shared<OutboxCore>(std::move(block.block), std::move(transport),
                                           std::move(geometry), slot_bytes, drop_newest,
                                           queue_limit, timeout, credit_wait, socket);
  core->start([weak = std::weak_ptr<OutboxCore>(core)] {
    auto held = std::make_unique<std::weak_ptr<OutboxCore>>(weak);
    if (Py_IsInitialized() != 0 && Py_AddPendingCall(&reap_later, held.get()) == 0)
      static_cast<void>(held.release());
  });
  return {std::move(core)};
}

nb::object push(PyOutbox& self, uint64_t microbatch, uint32_t cell, uintptr_t data, size_t rows,
                size_t pitch, uint64_t row_begin, uintptr_t stream, nb::tuple shape,
                nb::object owner, int64_t version, nb::object checksum) {
  Push push;
  push.microbatch = microbatch;
  push.cell = cell;
  push.source = {reinterpret_cast<const uint8_t*>(data), rows, pitch};
  push.row_begin = row_begin;
  push.stream = stream;
  push.ndim = static_cast<uint32_t>(std::min<size_t>(shape.size(), kMaxDims));
  for (uint32_t i = 0; i < push.ndim; ++i) push.shape[i] = nb::cast<uint64_t>(shape[i]);
  push.checksummed = !checksum.is_none();
  if (push.checksummed) push.checksum = nb::cast<uint32_t>(checksum);
  push.version = version;
  push.owner = owner.inc_ref()
                   .ptr();  // handed over; comes back through reap, or here if the push is refused
  Verdict verdict;
  try {
    nb::gil_scoped_release open;
    verdict = self.core->push(push, &interrupted_by_signal);
  } catch (...) {
    owner.dec_ref();
    throw;
  }
  if (verdict) owner.dec_ref();
  if (verdict.fault == Fault::interrupted) nb::raise_python_error();
  PyOutbox::reap(*self.core, true);
  return verdict_or_none(verdict);
}

template <class Call>
nb::object without_gil(PyOutbox& self, Call&& call) {
  Verdict verdict;
  {
    nb::gil_scoped_release open;
    verdict = call(*self.core);
  }
  if (verdict.fault == Fault::interrupted) nb::raise_python_error();
  if (verdict.fault != Fault::forked) PyOutbox::reap(*self.core, false);
  return verdict_or_none(verdict);
}

nb::dict counters(PyOutbox& self) {
  OutboxCounters facts = self.core->counters();
  nb::dict made;
  made["pushes"] = facts.pushes;
  made["bytes"] = facts.bytes;
  made["deferred"] = facts.deferred;
  made["dropped"] = facts.dropped;
  made["queued"] = facts.queued;
  made["queued_peak"] = facts.queued_peak;
  made["credit_wait_s"] = facts.credit_wait_s;
  return made;
}

}  // namespace

void bind_outbox(nb::module_& module) {
  nb::class_<Wire>(module, "Wire", "How a lane's bytes cross; an outbox takes it over.")
      .def(nb::new_([](const Arena& arena) { return over_arena(arena); }), nb::arg("arena"))
      .def_static("staged", &over_staging, nb::arg("staging"), nb::arg("arrivals"),
                  nb::arg("ordinal").none(),
                  "Into staging memory that a gate empties, by this GPU, or by the CPU.");
  nb::class_<PyOutbox> outbox(module, "Outbox", "The producer's core: one lane.");
  outbox.def(
      "__init__",
      [](PyOutbox* self, Wire& wire, Block& block, nb::list cells, uint64_t slot_bytes,
         bool drop_newest, size_t queue_limit, double timeout, double credit_wait, int socket) {
        new (self) PyOutbox(make(wire, block, cells, slot_bytes, drop_newest, queue_limit, timeout,
                                 credit_wait, socket));
      },
      nb::arg("wire"), nb::arg("block"), nb::arg("cells"), nb::arg("slot_bytes"),
      nb::arg("drop_newest"), nb::arg("queue_limit"), nb::arg("timeout"), nb::arg("credit_wait"),
      nb::arg("socket"), "Takes the wire, the block and the socket's descriptor over.",
      nb::sig("def __init__(self, wire: Wire, block: ControlBlock, cells: list[tuple[int, ...]], "
              "slot_bytes: int, drop_newest: bool, queue_limit: int, timeout: float, "
              "credit_wait: float, socket: int) "
              "-> None"));
  outbox.def(
      "open_pass",
      [](PyOutbox& self, uint64_t step, uint64_t microbatches) {
        return without_gil(self,
                           [&](OutboxCore& core) { return core.open_pass(step, microbatches); });
      },
      nb::arg("step"), nb::arg("microbatches"),
      nb::sig("def open_pass(self, step: int, microbatches: int) -> Verdict | None"));
  outbox.def(
      "close_pass",
      [](PyOutbox& self) {
        return without_gil(self, [](OutboxCore& core) { return core.close_pass(); });
      },
      nb::sig("def close_pass(self) -> Verdict | None"));
  outbox.def("push", &push, nb::arg("microbatch"), nb::arg("cell"), nb::arg("data"),
             nb::arg("rows"), nb::arg("pitch"), nb::arg("row_begin"), nb::arg("stream"),
             nb::arg("shape"), nb::arg("owner"), nb::arg("version"), nb::arg("checksum").none(),
             "None, or the verdict of a push that did not happen.",
             nb::sig("def push(self, microbatch: int, cell: int, data: int, rows: int, pitch: int, "
                     "row_begin: int, stream: int, shape: tuple[int, ...], owner: object, version: "
                     "int, checksum: int | None) -> Verdict | None"));
  outbox.def(
      "flush",
      [](PyOutbox& self, double timeout) {
        return without_gil(
            self, [&](OutboxCore& core) { return core.flush(timeout, &interrupted_by_signal); });
      },
      nb::arg("timeout"), nb::sig("def flush(self, timeout: float) -> Verdict | None"));
  outbox.def(
      "abort",
      [](PyOutbox& self, const std::string& reason) {
        without_gil(self, [&](OutboxCore& core) {
          core.abort(reason);
          return Verdict{};
        });
      },
      nb::arg("reason"));
  outbox.def("close", [](PyOutbox& self) {
    without_gil(self, [](OutboxCore& core) {
      core.close();
      return Verdict{};
    });
  });
  outbox.def(
      "check",
      [](PyOutbox& self) {
        return without_gil(self, [](OutboxCore& core) { return core.check(); });
      },
      nb::sig("def check(self) -> Verdict | None"));
  outbox.def(
      "carried",
      [](PyOutbox& self, double limit) {
        nb::gil_scoped_release open;
        return self.core->carried(static_cast<uint64_t>(limit * 1e9));
      },
      nb::arg("limit"), "Waits until the consumer's control block says what this side's says.");
  outbox.def(
      "has_credit",
      [](PyOutbox& self, uint64_t microbatch) {
        nb::gil_scoped_release open;
        return self.core->has_credit(microbatch);
      },
      nb::arg("microbatch"), "Whether a push of this microbatch would not have to wait.");
  outbox.def("counters", &counters, nb::sig("def counters(self) -> dict[str, int | float]"));
  outbox.def(
      "events",
      [](PyOutbox& self, bool producer) {
        auto& block = self.core->block();
        return events_of(producer ? block.producer_ring() : block.consumer_ring());
      },
      nb::arg("producer"), nb::sig("def events(self, producer: bool) -> list[tuple[int, ...]]"));
}

}  // namespace tapchannel
