// Announces as the consumer reads them: copied, then checked.
#pragma once

#include <vector>

#include "block.hpp"
#include "transport.hpp"

namespace tapchannel {

struct AnnounceFacts {
  bool present = false, fits = false;
  uint64_t rows = 0, row_begin = 0;
  uint32_t dtype = 0, flags = 0, checksum = 0;
  std::vector<uint64_t> shape;
};

// Copies an announce, then checks the copy against the plan's cell: its writer may change the words
// under every look. present: it names this key; fits: its numbers may be used.
AnnounceFacts read_announce(const ControlBlock& block, const CellGeometry& geometry, size_t cell,
                            size_t slot, uint64_t key);

}  // namespace tapchannel
