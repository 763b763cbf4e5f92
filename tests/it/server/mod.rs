//! The server's request pipeline over real sockets: authentication, authorization, routing, and limits.

mod attacks;
mod fixture;
mod limits;
mod logs;
mod pipeline;
mod table;
mod traces;
