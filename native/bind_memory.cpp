#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "arrivals.hpp"
#include "bind.hpp"

namespace tapchannel {

namespace {

std::array<uint8_t, 16> id_from(const nb::bytes& id) {
  if (id.size() != 16) throw std::invalid_argument("a mailbox id has 16 bytes");
  std::array<uint8_t, 16> made{};
  std::memcpy(made.data(), id.c_str(), 16);
  return made;
}

void bind_host(nb::class_<Arena>& arena) {
  arena.def_static(
      "create_host",
      [](const std::string& name, size_t bytes) {
        nb::gil_scoped_release open;
        auto memory = std::make_shared<Mapping>(Mapping::create(name, bytes));
        memory->populate();
        return Arena{std::move(memory), nullptr};
      },
      nb::arg("name"), nb::arg("bytes"),
      "Makes a sealed memfd of this size and commits its pages.");
  arena.def_static(
      "adopt_host",
      [](int fd, size_t bytes) {
        nb::gil_scoped_release open;
        auto memory = std::make_shared<Mapping>(Mapping::adopt(fd, bytes));
        memory->populate();  // else the first push into each slot pays for its page faults
        return Arena{std::move(memory), nullptr};
      },
      nb::arg("fd"), nb::arg("bytes"),
      "Maps a received memfd after checking its size and seals; takes the descriptor over.");
}

void bind_device(nb::class_<Arena>& arena) {
  using cuda::Device;
  using cuda::DeviceArena;
  auto shared = [](DeviceArena made) {
    return Arena{nullptr, std::make_shared<DeviceArena>(std::move(made))};
  };
  arena.def_static(
      "create_vmm",
      [shared](int ordinal, size_t bytes) {
        nb::gil_scoped_release open;
        return shared(DeviceArena::allocate_vmm(Device(ordinal), bytes));
      },
      nb::arg("ordinal"), nb::arg("bytes"),
      "Allocates device memory that is exported as a file descriptor.");
  arena.def_static(
      "create_ipc",
      [shared](int ordinal, size_t bytes) {
        nb::gil_scoped_release open;
        return shared(DeviceArena::allocate_ipc(Device(ordinal), bytes));
      },
      nb::arg("ordinal"), nb::arg("bytes"),
      "Allocates device memory that is exported as a classic CUDA IPC handle.");
  arena.def_static(
      "import_vmm",
      [shared](int ordinal, int fd, size_t bytes) {
        nb::gil_scoped_release open;
        return shared(DeviceArena::import_fd(Device(ordinal), fd, bytes));
      },
      nb::arg("ordinal"), nb::arg("fd"), nb::arg("bytes"),
      "Maps a peer's device memory for a device of this process; the descriptor stays the "
      "caller's.");
  arena.def_static(
      "import_ipc",
      [shared](int ordinal, const nb::bytes& handle, size_t bytes) {
        if (handle.size() != 64) throw std::invalid_argument("a CUDA IPC handle has 64 bytes");
        DeviceArena::IpcHandle raw{};
        std::memcpy(raw.data(), handle.c_str(), raw.size());
        nb::gil_scoped_release open;
        return shared(DeviceArena::import_handle(Device(ordinal), raw, bytes));
      },
      nb::arg("ordinal"), nb::arg("handle"), nb::arg("bytes"),
      "Opens a peer's classic CUDA IPC handle.");
}

void check_held(const Arena& arena) {
  if (!arena.host && !arena.device) throw std::invalid_argument("the memory was let go already");
}

// The attach self-test's bytes, on a stream of their own: the caller's streams are neither waited
// for nor held up.
void probe(const Arena& arena, size_t offset, char* bytes, size_t size, bool write) {
  check_held(arena);
  size_t whole = arena.host ? arena.host->bytes() : arena.device->bytes();
  if (size > whole || offset > whole - size) throw std::invalid_argument("probe outside the arena");
  nb::gil_scoped_release open;
  if (arena.host) {
    uint8_t* at = arena.host->base() + offset;
    if (write)
      std::memcpy(at, bytes, size);
    else
      std::memcpy(bytes, at, size);
    return;
  }
  const auto& driver = cuda::require_driver();
  cuda::ContextGuard guard(arena.device->device());
  cuda::PinnedPage page(arena.device->device(), size);
  cuda::CUstream stream = nullptr;
  cuda::check(driver.cuStreamCreate(&stream, cuda::CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  if (write) std::memcpy(page.host(), bytes, size);
  cuda::CUdeviceptr at = arena.device->ptr() + offset;
  cuda::CUresult copied = write ? driver.cuMemcpyAsync(at, page.device_pointer(), size, stream)
                                : driver.cuMemcpyAsync(page.device_pointer(), at, size, stream);
  if (copied == cuda::CUDA_SUCCESS) copied = driver.cuStreamSynchronize(stream);
  static_cast<void>(driver.cuStreamDestroy(stream));
  cuda::check(copied, "cuMemcpyAsync");
  if (!write) std::memcpy(bytes, page.host(), size);
}

double seconds_of(uint64_t began_ns) { return static_cast<double>(now_ns() - began_ns) / 1e9; }

double time_host_reads(const Mapping& memory, size_t bytes, size_t times) {
  std::vector<uint8_t> to(bytes);
  double best = std::numeric_limits<double>::infinity();
  for (size_t one = 0; one < times; ++one) {
    uint64_t began = now_ns();
    std::memcpy(to.data(), memory.base(), bytes);
    best = std::min(best, seconds_of(began));
  }
  return best;
}

double time_device_reads(const cuda::DeviceArena& memory, size_t bytes, size_t times) {
  const auto& driver = cuda::require_driver();
  cuda::ContextGuard guard(memory.device());
  auto to = cuda::DeviceArena::allocate_vmm(memory.device(), bytes);
  cuda::CUstream stream = nullptr;
  cuda::check(driver.cuStreamCreate(&stream, cuda::CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  double best = std::numeric_limits<double>::infinity();
  cuda::CUresult copied = cuda::CUDA_SUCCESS;
  for (size_t one = 0; one < times && copied == cuda::CUDA_SUCCESS; ++one) {
    uint64_t began = now_ns();
    copied = driver.cuMemcpyAsync(to.ptr(), memory.ptr(), bytes, stream);
    if (copied == cuda::CUDA_SUCCESS) copied = driver.cuStreamSynchronize(stream);
    best = std::min(best, seconds_of(began));
  }
  static_cast<void>(driver.cuStreamDestroy(stream));
  cuda::check(copied, "cuMemcpyAsync");
  return best;
}

// Reads, and never writes: leases may be open on these slots, and other lanes write theirs.
double time_reads(const Arena& arena, size_t bytes, size_t times) {
  check_held(arena);
  size_t whole = arena.host ? arena.host->bytes() : arena.device->bytes();
  if (bytes == 0 || bytes > whole || times == 0)
    throw std::invalid_argument("nothing to read, or beyond the arena");
  nb::gil_scoped_release open;
  return arena.host ? time_host_reads(*arena.host, bytes, times)
                    : time_device_reads(*arena.device, bytes, times);
}

void bind_probe(nb::class_<Arena>& arena) {
  arena.def("time_reads", &time_reads, nb::arg("bytes"), nb::arg("times"),
            "The seconds of the shortest of several reads of the first bytes, into memory of this "
            "process; writes nothing.");
  arena.def(
      "write_probe",
      [](const Arena& self, size_t offset, const nb::bytes& pattern) {
        std::string bytes(pattern.c_str(), pattern.size());
        probe(self, offset, bytes.data(), bytes.size(), true);
      },
      nb::arg("offset"), nb::arg("pattern"),
      "Writes bytes and waits until they are performed; for the attach self-test.");
  arena.def(
      "read_probe",
      [](const Arena& self, size_t offset, size_t bytes) {
        if (bytes > 65536) throw std::invalid_argument("probe outside the arena");
        std::string pattern(bytes, '\0');
        probe(self, offset, pattern.data(), bytes, false);
        return nb::bytes(pattern.data(), pattern.size());
      },
      nb::arg("offset"), nb::arg("bytes"), "Reads bytes back; for the attach self-test.");
}

void bind_arena(nb::module_& module) {
  nb::class_<Arena> arena(module, "Arena", "Memory that holds the slots.");
  bind_host(arena);
  bind_device(arena);
  bind_probe(arena);
  arena.def(
      "share",
      [](const Arena& self) {
        check_held(self);
        return self;
      },
      "A second reference to the same memory, for an outbox of the same process.");
  arena.def(
      "drop", [](Arena& self) { self = Arena{}; },
      "Lets go of this reference to the memory; the last one frees it.");
  arena.def(
      "export_fd",
      [](const Arena& self) {
        check_held(self);
        return self.host ? fcntl(self.host->fd(), F_DUPFD_CLOEXEC, 3) : self.device->export_fd();
      },
      "A new descriptor of the memory, the caller's to close.");
  arena.def("export_handle", [](const Arena& self) {
    if (!self.device) throw std::invalid_argument("host memory has no CUDA IPC handle");
    auto handle = self.device->export_handle();
    return nb::bytes(handle.data(), handle.size());
  });
  arena.def_prop_ro("kind", [](const Arena& self) {
    check_held(self);
    return self.host ? "host" : cuda::to_text(self.device->kind());
  });
  arena.def_prop_ro("bytes", [](const Arena& self) {
    check_held(self);
    return self.host ? self.host->bytes() : self.device->bytes();
  });
}

}  // namespace

void bind_memory(nb::module_& module) {
  bind_arena(module);
  module.def("arrival_bytes", &arrival_bytes, nb::arg("depth"), nb::arg("cells"),
             "The size of one lane's arrival words.");
  nb::class_<Block> block(module, "ControlBlock", "The shared words of one lane.");
  block.def_static(
      "create",
      [](const std::string& name, uint32_t lane, uint32_t depth, uint32_t cells,
         const nb::bytes& id) {
        return Block{ControlBlock::create(name, lane, depth, cells, id_from(id))};
      },
      nb::arg("name"), nb::arg("lane"), nb::arg("depth"), nb::arg("cells"), nb::arg("mailbox_id"));
  block.def_static(
      "adopt",
      [](int fd, uint32_t lane, uint32_t depth, uint32_t cells, const nb::bytes& id) {
        return Block{ControlBlock::adopt(fd, lane, depth, cells, id_from(id))};
      },
      nb::arg("fd"), nb::arg("lane"), nb::arg("depth"), nb::arg("cells"), nb::arg("mailbox_id"),
      "Maps a received block after checking its size, seals and header; takes the descriptor "
      "over.");
  block.def("export_fd",
            [](const Block& self) { return fcntl(self.block.memory().fd(), F_DUPFD_CLOEXEC, 3); });
  block.def(
      "events",
      [](const Block& self, bool producer) {
        return events_of(producer ? self.block.producer_ring() : self.block.consumer_ring());
      },
      nb::arg("producer"),
      "The flight recorder of one side: (number, time_ns, key, bytes, step, cell), oldest first.",
      nb::sig("def events(self, producer: bool) -> list[tuple[int, ...]]"));
}

}  // namespace tapchannel
