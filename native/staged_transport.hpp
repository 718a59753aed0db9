// host_staged, the producer's half: the payload goes into staging memory of the host, and an
// arrival word says that it is there. The consumer's gate does the rest (gate.hpp).
#pragma once

#include "arrivals.hpp"
#include "cuda_transport.hpp"
#include "pinned_mapping.hpp"

namespace tapchannel {

// On a GPU: a copy into the staging cell, then cuStreamWriteValue64 of the arrival word on the same
// stream.
inline std::unique_ptr<Transport> staged_transport(const std::shared_ptr<PinnedMapping>& staging,
                                                   const std::shared_ptr<PinnedMapping>& arrivals) {
  return std::make_unique<CudaTransport>(staging->device(),
                                         CopyTarget{staging->address(), staging->base(), staging},
                                         WordHome{arrivals->address(), arrivals});
}

// On a CPU: payload stores, then a release store of the arrival word.
class StagedHostTransport final : public ShmTransport {
 public:
  StagedHostTransport(std::shared_ptr<Mapping> staging, std::shared_ptr<Mapping> arrivals)
      : ShmTransport(std::move(staging)), arrivals_(std::move(arrivals)) {}
  void stamp(const Mark& mark, const Place& at) override {
    ShmTransport::stamp({arrival(*arrivals_, at.cell), mark.key, mark.announce}, at);
  }

 private:
  std::shared_ptr<Mapping> arrivals_;
};

}  // namespace tapchannel
