//! Who gets in: TLS of the main listener and its reloads, and reviews by an API server.

mod client;
mod handshake;
mod openssl;
mod reload;
mod reviews;
