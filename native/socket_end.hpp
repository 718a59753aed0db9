// The end of a lane's socket: the first sign of the peer's death, on both sides.
#pragma once

#include <poll.h>

namespace tapchannel {

// Not by reading: nothing is due on this socket, so a peer that sent a byte before it died would
// hide its own end behind that byte for ever.
inline bool socket_ended(int socket) {
  pollfd one{socket, POLLRDHUP, 0};
  return poll(&one, 1, 0) == 1;
}

}  // namespace tapchannel
