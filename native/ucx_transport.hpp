// ucx, the producer's end: puts over a link, from host memory or from a GPU.
#pragma once

#include "cuda_events.hpp"
#include "ucx_link.hpp"

namespace tapchannel::ucx {

class UcxTransport : public Transport {
 public:
  UcxTransport(std::shared_ptr<Link> link, size_t cells) : link_(std::move(link)), last_(cells) {}
  ~UcxTransport() override { link_->end(); }
  Token order(uintptr_t) override { return nullptr; }
  void forget(Token) override {}
  void put(Token, const Source& source, const Place& to, const CellGeometry& cell) override {
    await_cell(to);
    link_->put_rows(source, to, cell, nullptr);
  }
  void put_poison(const Place& to, size_t rows, const CellGeometry& cell) override {
    if (rows == 0 || cell.row_bytes == 0) return;
    await_cell(to);
    auto row = std::make_shared<std::vector<uint8_t>>(cell.row_bytes, cell.poison_byte);
    link_->put_rows({row->data(), rows, 0}, to, cell, row);
  }
  void stamp(const Mark& mark, const Place& at) override { last_[at.cell] = link_->stamp(mark); }
  void mark() override {}
  uint64_t performed() const override { return link_->performed(); }
  bool finish(uint64_t limit_ns) override {
    if (link_->settle(limit_ns)) return true;
    link_->end();  // what is still under way must not read its source any more
    return false;
  }
  bool immediate() const override { return false; }
  bool in_call() const override { return false; }
  bool announces_ahead() const override { return true; }
  void begin(ControlBlock& block, int socket) override { link_->begin(block, socket); }
  void kick() override { link_->kick(); }
  bool settle(uint64_t limit_ns) override { return link_->settle(limit_ns); }
  bool rings() const override { return link_->rings(); }
  std::string failure() const override { return link_->failure(); }

 protected:
  Link& link() { return *link_; }
  // Puts have no mutual order, so a put of a dead pass must have been performed before a newer one
  // enters the same cell. With credit that is so already; after an abort it need not be.
  void await_cell(const Place& to) { link_->await(last_[to.cell]); }

 private:
  std::shared_ptr<Link> link_;
  std::vector<uint64_t> last_;  // by cell: the number of its last stamp
};

// From a GPU. UCX knows no streams, so the lane's own thread waits for step 4's event. Where UCX
// knows GPU memory it reads the source itself; elsewhere the rows go by a ring of pinned buffers.
class UcxGpuTransport final : public UcxTransport {
 public:
  UcxGpuTransport(std::shared_ptr<Link> link, size_t cells, const cuda::Device& device,
                  bool ucx_reads_gpu);
  ~UcxGpuTransport() override;
  void enter_thread() override { cuda::relax_capture_on_this_thread(); }
  Token order(uintptr_t stream) override { return events_.record(stream); }
  void forget(Token token) override { events_.give_back(static_cast<cuda::CUevent>(token)); }
  void put(Token token, const Source& source, const Place& to, const CellGeometry& cell) override;
  void cancel() override { cancelled_.store(true, std::memory_order_release); }

 private:
  class Ring;
  void await(const std::function<cuda::CUresult()>& query, const char* call);
  void put_by_ring(const Source& source, const Place& to, const CellGeometry& cell);
  cuda::Device device_;
  cuda::Events events_;
  bool ucx_reads_gpu_;
  cuda::CUstream stream_ = nullptr;
  std::shared_ptr<Ring> ring_;  // shared with the puts that still read from it
  std::atomic<bool> cancelled_{false};
};

}  // namespace tapchannel::ucx
