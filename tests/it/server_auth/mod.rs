//! Server authentication: TLS of the main listener with reload, and token and access reviews.

mod certificate_reload;
mod client;
mod handshake;
mod openssl;
mod reviews;
