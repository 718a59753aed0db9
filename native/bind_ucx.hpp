// The UCX objects that bindings of several files share.
#pragma once

#include "ucx_link.hpp"

namespace tapchannel {

struct PyUcxContext {
  std::shared_ptr<ucx::Context> context;
};

struct UcxMemory {
  std::shared_ptr<ucx::Memory> memory;
};

struct PyUcxLink {
  std::shared_ptr<ucx::Link> link;
};

// The block must outlive the link that the registration is given to.
UcxMemory register_block(const PyUcxContext& context, const ControlBlock& block);

}  // namespace tapchannel
