//! Parser of default routes in `/proc/net` routing tables. Pure. Implements spec 01 §12.2.

/// `RTF_UP`: the route is usable.
const UP: u32 = 0x1;
/// `RTF_REJECT`: the route rejects packets.
const REJECT: u32 = 0x200;

fn is_used(flags: &str) -> bool {
    u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & UP != 0 && flags & REJECT == 0)
}

fn is_zero(hex: &str) -> bool {
    !hex.is_empty() && hex.bytes().all(|digit| digit == b'0')
}

fn interfaces(lines: impl Iterator<Item = Option<String>>) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for interface in lines.flatten().filter(|interface| interface != "lo") {
        if !found.contains(&interface) {
            found.push(interface);
        }
    }
    found
}

/// Interfaces of default routes in `/proc/net/route`, in file order.
pub(super) fn default_v4(table: &str) -> Vec<String> {
    interfaces(table.lines().map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [interface, destination, _, flags, _, _, _, mask, ..] = columns.as_slice() else { return None };
        (is_zero(destination) && is_zero(mask) && is_used(flags)).then(|| (*interface).to_owned())
    }))
}

/// Interfaces of default routes in `/proc/net/ipv6_route`, in file order.
pub(super) fn default_v6(table: &str) -> Vec<String> {
    interfaces(table.lines().map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [destination, prefix, _, _, gateway, _, _, _, flags, interface] = columns.as_slice() else { return None };
        let is_default = is_zero(destination) && is_zero(prefix) && !is_zero(gateway);
        (is_default && is_used(flags)).then(|| (*interface).to_owned())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_routes_are_found() {
        let table = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
            eth0 0002A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n\
            eth1 00000000 0102A8C0 0003 0 0 0 00000000 0 0 0\n\
            eth1 00000000 0102A8C0 0003 0 0 9 00000000 0 0 0\n\
            eth2 00000000 0102A8C0 0202 0 0 0 00000000 0 0 0\n\
            eth3 00000000 0102A8C0 0003 0 0 9 00000080 0 0 0\nnonsense\n";
        assert_eq!(default_v4(table), ["eth1"]);
        let zero = "00000000000000000000000000000000";
        let gateway = "fe800000000000000000000000000001";
        let table = format!(
            "{zero} 00 {zero} 00 {gateway} 00000400 00000001 00000000 00000003 eth0\n\
             {zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200 lo\n\
             {gateway} 80 {zero} 00 {gateway} 00000400 00000001 00000000 00000003 eth1\n"
        );
        assert_eq!(default_v6(&table), ["eth0"]);
    }
}
