//! Interface statistics of another network namespace over netlink, without entering it.
//!
//! The kernel identifies the other namespace by its id (nsid) in this namespace.
//!
//! Numbers are those of `linux/net_namespace.h`, `linux/if_link.h` and `linux/rtnetlink.h`.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use super::{
    message::{Attributes, Message, u64_at},
    rtnetlink,
    socket::{Reply, Socket},
};

const NEW_NAMESPACE_ID: u16 = 88;
const GET_NAMESPACE_ID: u16 = 90;
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
/// `NETNSA_NSID_NOT_ASSIGNED`: the namespace has no id here; in a request: any free id.
const NONE: u32 = u32::MAX;
const IFLA_TARGET_NETNSID: u16 = 46;
/// `rtgenmsg`, padded.
const HEAD: [u8; 4] = [0; 4];

const NEW_LINK: u16 = 16;
const LINK_HEAD: usize = 16;
const IFLA_IFNAME: u16 = 3;
const IFLA_STATS64: u16 = 23;

/// Statistics of one direction of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DirectionCounters {
    /// Bytes transferred.
    pub bytes: u64,
    /// Packets transferred.
    pub packets: u64,
    /// Packets with errors.
    pub errors: u64,
    /// Dropped packets.
    pub dropped: u64,
}

/// Statistics of a link.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LinkCounters {
    /// Interface name.
    pub name: String,
    /// Received traffic.
    pub received: DirectionCounters,
    /// Sent traffic.
    pub sent: DirectionCounters,
}

/// Statistics of all links of a namespace. The socket belongs to this namespace.
///
/// # Errors
/// The kernel's error.
pub fn of_namespace(socket: &mut Socket, namespace: BorrowedFd<'_>) -> io::Result<Vec<LinkCounters>> {
    let number = match number(socket, namespace)? {
        Some(number) => number,
        None => {
            let request = about(NEW_NAMESPACE_ID, namespace).with_u32(NETNSA_NSID, NONE);
            match socket.request(request) {
                // An id was assigned concurrently.
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            number(socket, namespace)?.ok_or(io::ErrorKind::NotFound)?
        }
    };
    let links = socket.dump(&rtnetlink::get_links().with_u32(IFLA_TARGET_NETNSID, number))?;
    Ok(links.iter().filter_map(read).collect())
}

fn about(kind: u16, namespace: BorrowedFd<'_>) -> Message {
    Message::new(kind, 0, &HEAD).with_u32(NETNSA_FD, namespace.as_raw_fd().cast_unsigned())
}

/// Id of another namespace in this namespace; `None` if it has none.
fn number(socket: &mut Socket, namespace: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let reply = socket.query(about(GET_NAMESPACE_ID, namespace))?;
    let found = reply.filter(|reply| reply.kind == NEW_NAMESPACE_ID);
    let number = found.and_then(|reply| Attributes::behind(&reply.body, HEAD.len()).u32(NETNSA_NSID));
    Ok(number.filter(|number| *number != NONE))
}

fn read(reply: &Reply) -> Option<LinkCounters> {
    if reply.kind != NEW_LINK {
        return None;
    }
    let found = Attributes::behind(&reply.body, LINK_HEAD);
    let counters = found.get(IFLA_STATS64)?;
    // `rtnl_link_stats64`: received and sent values alternate.
    let at = |place: usize| u64_at(counters, place * 8);
    let direction = |first: usize| {
        Some(DirectionCounters {
            packets: at(first)?,
            bytes: at(first + 2)?,
            errors: at(first + 4)?,
            dropped: at(first + 6)?,
        })
    };
    Some(LinkCounters { name: found.text(IFLA_IFNAME)?, received: direction(0)?, sent: direction(1)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_stand_where_the_kernel_puts_them() {
        let numbers: Vec<u8> = (1_u64..=25).flat_map(u64::to_ne_bytes).collect();
        let message =
            Message::new(NEW_LINK, 0, &[0; LINK_HEAD]).with_text(IFLA_IFNAME, "eth0").with(IFLA_STATS64, &numbers);
        let body = message.bytes()[16..].to_vec();
        let counters = read(&Reply { kind: NEW_LINK, body: body.clone() }).expect("a link");
        assert_eq!(counters.name, "eth0");
        assert_eq!(counters.received, DirectionCounters { packets: 1, bytes: 3, errors: 5, dropped: 7 });
        assert_eq!(counters.sent, DirectionCounters { packets: 2, bytes: 4, errors: 6, dropped: 8 });
        let short =
            Message::new(NEW_LINK, 0, &[0; LINK_HEAD]).with_text(IFLA_IFNAME, "eth0").with(IFLA_STATS64, &[0; 40]);
        assert_eq!(read(&Reply { kind: NEW_LINK, body: short.bytes()[16..].to_vec() }), None);
        assert_eq!(read(&Reply { kind: 17, body }), None);
    }

    #[test]
    fn our_own_namespace_is_one_like_others() {
        use std::os::fd::AsFd;
        if !nix::unistd::geteuid().is_root() {
            println!("skipped our_own_namespace_is_one_like_others: needs root: numbers namespaces");
            return;
        }
        let made = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a namespace");
            std::fs::File::open("/proc/thread-self/ns/net").expect("its file")
        });
        let other = made.join().expect("a namespace");
        let mut socket = Socket::open(super::super::NetlinkFamily::Route).expect("a socket");
        for _ in 0..2 {
            let links = of_namespace(&mut socket, other.as_fd()).expect("links");
            assert!(links.iter().any(|link| link.name == "lo"), "{links:?}");
        }
    }
}
