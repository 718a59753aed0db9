// The gate's passage into a GPU's slots: from pinned staging memory by the copy engine.
#pragma once

#include <vector>

#include "copy_streams.hpp"
#include "passage.hpp"
#include "pinned_mapping.hpp"

namespace tapchannel {

struct RegisteredBlock {  // a lane's control block, as the host and as the GPU name it
  const uint8_t* base = nullptr;
  std::shared_ptr<const cuda::RegisteredHost> registered;
};

// Ordering rule: copy, then cuStreamWriteValue64 of the stamp on the same stream. No stream of a
// caller may wait for the stamp before both are enqueued here: the wait could hold them up (I6).
class CudaPassage final : public Passage {
 public:
  CudaPassage(std::shared_ptr<cuda::DeviceArena> arena, std::shared_ptr<PinnedMapping> staging,
              std::vector<RegisteredBlock> blocks);
  ~CudaPassage() override;
  void enter_thread() override { cuda::relax_capture_on_this_thread(); }
  void let_through(const Arrival& arrival) override;
  void mark() override { streams_->mark(); }
  uint64_t performed() const override { return streams_->performed(); }

 private:
  struct Reach {  // all that a copy in flight touches
    std::shared_ptr<cuda::DeviceArena> arena;
    std::shared_ptr<PinnedMapping> staging;
    std::vector<RegisteredBlock> blocks;
  };
  Reach reach_;
  std::unique_ptr<cuda::CopyStreams> streams_;
};

}  // namespace tapchannel
