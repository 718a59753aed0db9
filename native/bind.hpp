// Bindings hold no logic: they convert, let go of the GIL, and call.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "block.hpp"
#include "cuda_memory.hpp"
#include "mapping.hpp"
#include "transport.hpp"

namespace tapchannel {

namespace nb = nanobind;

// An arena of either kind, shared by whoever may still touch its bytes.
struct Arena {
  std::shared_ptr<Mapping> host;
  std::shared_ptr<cuda::DeviceArena> device;
};

// A lane's transport before it has its control block.
struct Wire {
  std::function<std::unique_ptr<Transport>(const ControlBlock&)> make;
};

struct Block {  // moved from when a mailbox or an outbox takes it over
  ControlBlock block;
};

void bind_cuda(nb::module_& module);
void bind_faults(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_mailbox(nb::module_& module);
void bind_outbox(nb::module_& module);
void bind_ucx(nb::module_& module);

// For native waits that run without the GIL: true once Python has an exception to raise (Ctrl-C).
bool interrupted_by_signal();

nb::list events_of(const Ring& ring);
CellGeometry geometry_from(nb::handle fields);

}  // namespace tapchannel
