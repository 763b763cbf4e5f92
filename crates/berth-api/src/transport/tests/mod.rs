//! The transport against a faulty server, over real sockets.

#[cfg(test)]
mod answers;
#[cfg(test)]
mod changes;
#[cfg(test)]
mod outages;
#[cfg(test)]
mod pools;
#[cfg(test)]
mod proxies;
#[cfg(test)]
mod server;
