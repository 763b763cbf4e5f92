//! The server's pipeline behind real sockets: what is said before anybody is asked who he is, who
//! is let in, which endpoint answers, and what a client may do to us.

mod attacks;
mod limits;
mod logs;
mod pipeline;
mod site;
mod table;
