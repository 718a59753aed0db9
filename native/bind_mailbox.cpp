#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "bind_ucx.hpp"
#include "cuda_port.hpp"
#include "dlpack.hpp"
#include "mailbox.hpp"

namespace tapchannel {

namespace {

using Core = std::shared_ptr<MailboxCore>;

// The Python object. Leases share the core, so memory and words outlive it while a view is alive.
struct PyMailbox {
  Core core;
  ~PyMailbox() {
    if (core) core->close();
  }
};

nb::object verdict_or_none(const Verdict& verdict) {
  return verdict ? nb::cast(verdict) : nb::none();
}

// What a tensor's storage holds on to. Its deleter is the release (I9).
struct View {
  dlpack::ManagedTensor managed{};
  int64_t shape = 0;
  int64_t stride = 1;
  Core core;
  uint64_t lease = 0;

  static void end(dlpack::ManagedTensor* managed) {
    auto* view = static_cast<View*>(managed->context);
    view->core->drop(view->lease);
    delete view;
  }
};

// Runs on a capsule that nobody turned into a tensor.
void end_unused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

nb::object capsule_of(const Core& core, uint64_t lease, uint64_t microbatch) {
  auto* view = new View;
  view->core = core;
  view->lease = lease;
  view->shape = static_cast<int64_t>(core->slot_bytes());
  const Port& port = core->port();
  view->managed.tensor = {port.base() + microbatch % core->depth() * core->slot_bytes(),
                          {port.on_host() ? 1 : 2, port.ordinal()},
                          1,
                          {1, 8, 1},
                          &view->shape,
                          &view->stride,
                          0};
  view->managed.context = view;
  view->managed.deleter = &View::end;
  PyObject* capsule = PyCapsule_New(&view->managed, "dltensor", &end_unused);
  if (capsule == nullptr) {
    View::end(&view->managed);
    nb::raise_python_error();
  }
  return nb::steal(capsule);
}

PyMailbox make(const Arena& arena, nb::list blocks, nb::list cells, size_t depth,
               uint64_t slot_bytes, bool fill_released) {
  std::vector<ControlBlock> taken;
  std::vector<std::vector<CellGeometry>> geometry;
  for (nb::handle block : blocks) taken.push_back(std::move(nb::cast<Block&>(block).block));
  for (nb::handle lane : cells) {
    geometry.emplace_back();
    for (nb::handle cell : lane) geometry.back().push_back(geometry_from(cell));
  }
  std::unique_ptr<Port> port;
  if (arena.host) {
    port = std::make_unique<HostPort>(arena.host);
  } else {
    std::vector<ControlBlock*> words;
    words.reserve(taken.size());
    for (auto& block : taken) words.push_back(&block);
    port = std::make_unique<CudaPort>(arena.device->device(), arena.device, words);
  }
  return {std::make_shared<MailboxCore>(std::move(port), std::move(taken), std::move(geometry),
                                        depth, slot_bytes, fill_released)};
}

nb::tuple receive(PyMailbox& self, uint64_t microbatch, int mode, uintptr_t stream, double timeout,
                  int64_t rows) {
  std::pair<Verdict, uint64_t> got;
  {
    nb::gil_scoped_release open;
    got = self.core->recv({microbatch, static_cast<WaitMode>(mode), stream, timeout, rows < 0, rows,
                           &interrupted_by_signal});
  }
  if (got.first.fault == Fault::interrupted) nb::raise_python_error();
  if (got.first) return nb::make_tuple(got.first, 0, nb::none());
  return nb::make_tuple(nb::none(), got.second, capsule_of(self.core, got.second, microbatch));
}

template <class Call>
nb::object without_gil(Call&& call) {
  Verdict verdict;
  {
    nb::gil_scoped_release open;
    verdict = call();
  }
  if (verdict.fault == Fault::interrupted) nb::raise_python_error();
  return verdict_or_none(verdict);
}

nb::object announced(PyMailbox& self, size_t lane, size_t cell, uint64_t key) {
  AnnounceFacts facts = self.core->announce(lane, cell, key);
  if (!facts.present) return nb::none();
  nb::object checksum = (facts.flags & kChecksummed) != 0 ? nb::cast(facts.checksum) : nb::none();
  return nb::make_tuple(facts.rows, facts.row_begin, nb::tuple(nb::cast(facts.shape)),
                        (facts.flags & kDropped) != 0, checksum);
}

nb::dict status(PyMailbox& self, size_t lane) {
  LaneStatus facts = self.core->lane_status(lane);
  nb::dict made;
  made["attached"] = facts.attached;
  made["lost"] = facts.lost;
  made["revoked"] = facts.revoked;
  made["ever"] = facts.ever;
  made["silent_s"] = facts.silent_known ? nb::cast(facts.silent_s) : nb::none();
  made["attaches"] = facts.attaches;
  made["bytes"] = facts.counters.bytes;
  made["messages"] = facts.counters.messages;
  made["dropped"] = facts.counters.dropped;
  made["wait_s"] = facts.counters.wait_s;
  return made;
}

void bind_lanes(nb::class_<PyMailbox>& mailbox) {
  mailbox.def(
      "may_attach",
      [](PyMailbox& self, size_t lane) {
        nb::gil_scoped_release open;
        return static_cast<int>(self.core->may_attach(lane));
      },
      nb::arg("lane"), "0 free, 1 taken, 2 not fenced yet, 3 closed, 4 revoked.");
  mailbox.def(
      "attach",
      [](PyMailbox& self, size_t lane, int socket, int pidfd, bool same_process, bool staged,
         const PyUcxLink* link) {
        std::shared_ptr<LaneLink> held = link == nullptr ? nullptr : link->link;
        nb::gil_scoped_release open;
        return static_cast<int>(
            self.core->attach(lane, socket, pidfd, same_process, staged, std::move(held)));
      },
      nb::arg("lane"), nb::arg("socket"), nb::arg("pidfd"), nb::arg("same_process"),
      nb::arg("staged"), nb::arg("link").none(),
      "Takes both descriptors over when it returns 0. staged: its payload passes the gate.");
  mailbox.def(
      "open_gate",
      [](PyMailbox& self, const Arena& staging) {
        if (!staging.host) throw std::invalid_argument("staging memory is host memory");
        nb::gil_scoped_release open;
        return self.core->open_gate(staging.host);
      },
      nb::arg("staging"), "Makes the gate unless there is one; False once closed.");
  mailbox.def(
      "arrivals_fd",
      [](PyMailbox& self, size_t lane, const std::string& name) {
        return self.core->arrivals_fd(lane, name);
      },
      nb::arg("lane"), nb::arg("name"),
      "A new descriptor of the lane's arrival words, the caller's to close; -1 without a gate.");
  mailbox.def(
      "undo_attach", [](PyMailbox& self, size_t lane) { self.core->undo_attach(lane); },
      nb::arg("lane"), nb::call_guard<nb::gil_scoped_release>());
  mailbox.def(
      "revoke",
      [](PyMailbox& self, size_t lane, const std::string& reason) {
        self.core->revoke(lane, reason);
      },
      nb::arg("lane"), nb::arg("reason"), nb::call_guard<nb::gil_scoped_release>());
  mailbox.def(
      "carried",
      [](PyMailbox& self, double limit) {
        nb::gil_scoped_release open;
        return self.core->carried(static_cast<uint64_t>(limit * 1e9));
      },
      nb::arg("limit"), "Waits until each producer's control block says what this side's says.");
  mailbox.def(
      "register_block",
      [](PyMailbox& self, size_t lane, const PyUcxContext& context) {
        return register_block(context, self.core->block(lane));
      },
      nb::arg("lane"), nb::arg("context"), "Registers a lane's control block.");
  mailbox.def("lane_status", &status, nb::arg("lane"),
              nb::sig("def lane_status(self, lane: int) -> dict[str, bool | int | float | None]"));
  mailbox.def(
      "block_fd",
      [](PyMailbox& self, size_t lane) {
        return fcntl(self.core->block(lane).memory().fd(), F_DUPFD_CLOEXEC, 3);
      },
      nb::arg("lane"));
  mailbox.def(
      "events",
      [](PyMailbox& self, size_t lane, bool producer) {
        auto& block = self.core->block(lane);
        return events_of(producer ? block.producer_ring() : block.consumer_ring());
      },
      nb::arg("lane"), nb::arg("producer"),
      nb::sig("def events(self, lane: int, producer: bool) -> list[tuple[int, ...]]"));
}

}  // namespace

void bind_mailbox(nb::module_& module) {
  nb::class_<PyMailbox> mailbox(module, "Mailbox", "The consumer's core.");
  mailbox.def(
      "__init__",
      [](PyMailbox* self, const Arena& arena, nb::list blocks, nb::list cells, size_t depth,
         uint64_t slot_bytes,
         bool fill) { new (self) PyMailbox(make(arena, blocks, cells, depth, slot_bytes, fill)); },
      nb::arg("arena"), nb::arg("blocks"), nb::arg("cells"), nb::arg("depth"),
      nb::arg("slot_bytes"), nb::arg("fill_released"),
      nb::sig("def __init__(self, arena: Arena, blocks: list[ControlBlock], cells: "
              "list[list[tuple[int, ...]]], depth: int, slot_bytes: int, fill_released: bool) -> "
              "None"));
  mailbox.def(
      "open_pass",
      [](PyMailbox& self, uint64_t step, uint64_t microbatches) {
        return without_gil([&] { return self.core->open_pass(step, microbatches); });
      },
      nb::arg("step"), nb::arg("microbatches"),
      nb::sig("def open_pass(self, step: int, microbatches: int) -> Verdict | None"));
  mailbox.def(
      "close_pass",
      [](PyMailbox& self, double timeout) {
        return without_gil([&] { return self.core->close_pass(timeout, &interrupted_by_signal); });
      },
      nb::arg("timeout"), nb::sig("def close_pass(self, timeout: float) -> Verdict | None"));
  mailbox.def(
      "abort",
      [](PyMailbox& self, const std::string& reason) {
        nb::gil_scoped_release open;
        self.core->abort(reason);
      },
      nb::arg("reason"));
  mailbox.def(
      "reset", [](PyMailbox& self) { return without_gil([&] { return self.core->reset(); }); },
      nb::sig("def reset(self) -> Verdict | None"));
  mailbox.def("close", [](PyMailbox& self) {
    nb::gil_scoped_release open;
    self.core->close();
  });
  mailbox.def("recv", &receive, nb::arg("microbatch"), nb::arg("mode"), nb::arg("stream"),
              nb::arg("timeout"), nb::arg("rows"),
              "(verdict or None, lease, DLPack capsule of the slot); mode 0 try, 1 host, 2 stream.",
              nb::sig("def recv(self, microbatch: int, mode: int, stream: int, timeout: float, "
                      "rows: int) -> tuple[Verdict | None, int, object]"));
  mailbox.def(
      "check", [](PyMailbox& self) { return verdict_or_none(self.core->check()); },
      nb::sig("def check(self) -> Verdict | None"));
  mailbox.def(
      "check_lease",
      [](PyMailbox& self, uint64_t lease) {
        return verdict_or_none(self.core->check_lease(lease));
      },
      nb::arg("lease"), nb::sig("def check_lease(self, lease: int) -> Verdict | None"));
  mailbox.def(
      "settle",
      [](PyMailbox& self, uint64_t lease, double timeout) {
        return without_gil(
            [&] { return self.core->settle(lease, timeout, &interrupted_by_signal); });
      },
      nb::arg("lease"), nb::arg("timeout"),
      nb::sig("def settle(self, lease: int, timeout: float) -> Verdict | None"));
  mailbox.def(
      "announce", &announced, nb::arg("lane"), nb::arg("cell"), nb::arg("key"),
      "(rows, row_begin, shape, dropped, checksum or None), or None while nothing is announced.",
      nb::sig("def announce(self, lane: int, cell: int, key: int) -> tuple[int, "
              "int, tuple[int, ...], bool, int | None] | None"));
  mailbox.def(
      "record_stream",
      [](PyMailbox& self, uint64_t lease, uintptr_t stream) {
        return self.core->record_stream(lease, stream);
      },
      nb::arg("lease"), nb::arg("stream"));
  mailbox.def("holders", [](PyMailbox& self) { return self.core->holders(); });
  mailbox.def_prop_ro("epoch", [](PyMailbox& self) { return self.core->epoch(); });
  bind_lanes(mailbox);
}

}  // namespace tapchannel
