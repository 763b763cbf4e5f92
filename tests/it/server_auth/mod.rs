//! Server authentication: TLS of the main listener with reload, and token and access reviews.

mod client;
mod handshake;
mod openssl;
mod reload;
mod reviews;
