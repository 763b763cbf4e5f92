//! Who gets in: TLS of the main listener and its reloads, and reviews by an API server.

#[path = "../kit/cluster.rs"]
mod kit;

mod client;
mod handshake;
mod openssl;
mod reload;
mod reviews;
