#include "cuda_passage.hpp"

namespace tapchannel {

using namespace cuda;

CudaPassage::CudaPassage(std::shared_ptr<DeviceArena> arena, std::shared_ptr<PinnedMapping> staging,
                         std::vector<RegisteredBlock> blocks)
    : reach_{std::move(arena), std::move(staging), std::move(blocks)},
      streams_(std::make_unique<CopyStreams>(reach_.arena->device())) {}

CudaPassage::~CudaPassage() {
  try {
    if (streams_->finish(10000000000ULL)) return;
  } catch (const std::exception&) {  // nothing: the driver is shutting down, or the context lost
  }
  // Unmapping under a running copy would fault the whole context. Rather leak than that.
  new Reach(reach_);
  static_cast<void>(streams_.release());
}

void CudaPassage::let_through(const Arrival& arrival) {
  ContextGuard guard(reach_.arena->device());
  const CellGeometry& cell = *arrival.cell;
  Rows from{reach_.staging->address() + arrival.offset, reach_.staging->base() + arrival.offset,
            cell.pitch};
  Rows to{reach_.arena->ptr() + arrival.offset, nullptr, cell.pitch};
  enqueue_rows(to, from, cell.row_bytes, arrival.rows, streams_->of(arrival.track));
  const RegisteredBlock& block = reach_.blocks[arrival.lane];
  auto offset = static_cast<size_t>(reinterpret_cast<const uint8_t*>(arrival.stamp) - block.base);
  streams_->write(arrival.track, block.registered->device_pointer() + offset, arrival.key);
}

}  // namespace tapchannel
