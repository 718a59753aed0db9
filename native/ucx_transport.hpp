// ucx, the producer's end: puts over a link, from host memory.
#pragma once

#include "ucx_link.hpp"

namespace tapchannel::ucx {

class UcxTransport final : public Transport {
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
  bool announces_ahead() const override { return true; }
  void begin(ControlBlock& block, int socket) override { link_->begin(block, socket); }
  void kick() override { link_->kick(); }
  bool settle(uint64_t limit_ns) override { return link_->settle(limit_ns); }
  bool rings() const override { return link_->rings(); }
  std::string failure() const override { return link_->failure(); }

 private:
  // Puts have no mutual order, so a put of a dead pass must have been performed before a newer one
  // enters the same cell. With credit that is so already; after an abort it need not be.
  void await_cell(const Place& to) { link_->await(last_[to.cell]); }
  std::shared_ptr<Link> link_;
  std::vector<uint64_t> last_;  // by cell: the number of its last stamp
};

}  // namespace tapchannel::ucx
