//! IP address ranges in CIDR notation. Pure.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

/// An IP network: base address and prefix length.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cidr {
    first: IpAddr,
    prefix: u8,
}

/// Text that is not in CIDR notation.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("invalid CIDR address: {0}")]
pub struct NotACidr(String);

impl Cidr {
    /// The network that contains an address; `None` if the prefix is longer than the address.
    pub fn of(address: IpAddr, prefix: u8) -> Option<Self> {
        let bits = bits(address.is_ipv6());
        let host = bits.checked_sub(u32::from(prefix))?;
        let keep = if host >= 128 { 0 } else { u128::MAX << host };
        Some(Self { first: from_number(number(address) & keep, address.is_ipv6()), prefix })
    }

    /// First address (network address).
    pub fn first(self) -> IpAddr {
        self.first
    }

    /// Last address.
    pub fn last(self) -> IpAddr {
        from_number(self.number(self.size_less_one()), self.is_v6())
    }

    /// Prefix length in bits.
    pub fn prefix(self) -> u8 {
        self.prefix
    }

    /// Whether this is an IPv6 network.
    pub fn is_v6(self) -> bool {
        self.first.is_ipv6()
    }

    /// The second address, which belongs to the bridge.
    pub fn gateway(self) -> IpAddr {
        self.nth(1)
    }

    /// The address at an offset from the first, limited to the last address.
    pub fn nth(self, place: u128) -> IpAddr {
        from_number(self.number(place.min(self.size_less_one())), self.is_v6())
    }

    /// Number of addresses minus one.
    pub fn size_less_one(self) -> u128 {
        match bits(self.is_v6()) - u32::from(self.prefix) {
            128 => u128::MAX,
            host => (1 << host) - 1,
        }
    }

    /// Offset of an address from the first; `None` if the network does not contain it.
    pub fn place(self, address: IpAddr) -> Option<u128> {
        self.contains(address).then(|| number(address) - number(self.first))
    }

    /// Whether the network contains an address.
    pub fn contains(self, address: IpAddr) -> bool {
        Self::of(address, self.prefix) == Some(self)
    }

    /// Whether two networks overlap.
    pub fn overlaps(self, other: Self) -> bool {
        self.contains(other.first) || other.contains(self.first)
    }

    fn number(self, place: u128) -> u128 {
        number(self.first).saturating_add(place)
    }
}

impl FromStr for Cidr {
    type Err = NotACidr;

    fn from_str(text: &str) -> Result<Self, NotACidr> {
        let parsed = text.trim().split_once('/').and_then(|(address, prefix)| {
            let is_number = prefix.len() <= 3 && prefix.bytes().all(|b| b.is_ascii_digit());
            Self::of(address.parse().ok()?, prefix.parse().ok().filter(|_| is_number)?)
        });
        parsed.ok_or_else(|| NotACidr(text.to_owned()))
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

/// Parses comma-separated networks (the node's pod CIDRs). Keeps the first of each IP version.
///
/// # Errors
/// The first part that is not a network.
pub fn one_of_each(text: &str) -> Result<Vec<Cidr>, NotACidr> {
    let mut found: Vec<Cidr> = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let net: Cidr = part.parse()?;
        if found.iter().all(|other| other.is_v6() != net.is_v6()) {
            found.push(net);
        }
    }
    Ok(found)
}

/// Merges the networks of one IP version to sorted, disjoint ranges of first and last address.
pub fn ranges(nets: &[Cidr], is_v6: bool) -> Vec<(IpAddr, IpAddr)> {
    let mut sorted: Vec<(u128, u128)> =
        nets.iter().filter(|n| n.is_v6() == is_v6).map(|n| (number(n.first), number(n.last()))).collect();
    sorted.sort_unstable();
    let mut joined: Vec<(u128, u128)> = Vec::new();
    for (first, last) in sorted {
        match joined.last_mut() {
            Some(previous) if first <= previous.1.saturating_add(1) => previous.1 = previous.1.max(last),
            _ => joined.push((first, last)),
        }
    }
    joined.into_iter().map(|(first, last)| (from_number(first, is_v6), from_number(last, is_v6))).collect()
}

/// The next address; `None` after the last one of the IP version.
pub fn successor(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(v4) => u32::from(v4).checked_add(1).map(|n| Ipv4Addr::from(n).into()),
        IpAddr::V6(v6) => u128::from(v6).checked_add(1).map(|n| Ipv6Addr::from(n).into()),
    }
}

/// The address in network byte order: 4 or 16 bytes.
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn bits(is_v6: bool) -> u32 {
    if is_v6 { 128 } else { 32 }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u32::from(v4).into(),
        IpAddr::V6(v6) => v6.into(),
    }
}

fn from_number(number: u128, is_v6: bool) -> IpAddr {
    if is_v6 { Ipv6Addr::from(number).into() } else { Ipv4Addr::from(u32::try_from(number).unwrap_or(u32::MAX)).into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> Cidr {
        text.parse().expect("a net")
    }

    #[test]
    fn cidrs_are_parsed_and_formatted() {
        for (text, formatted, last) in [
            ("10.88.3.4/16", "10.88.0.0/16", "10.88.255.255"),
            ("0.0.0.0/0", "0.0.0.0/0", "255.255.255.255"),
            ("fd00::5/64", "fd00::/64", "fd00::ffff:ffff:ffff:ffff"),
            ("::/0", "::/0", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
            ("1.2.3.4/32", "1.2.3.4/32", "1.2.3.4"),
        ] {
            assert_eq!(net(text).to_string(), formatted);
            assert_eq!(net(text).last().to_string(), last, "{text}");
        }
        for wrong in ["", "10.0.0.0", "10.0.0.0/33", "::/129", "10.0.0.0/-1", "10.0.0.0/+8", "x/8", "10.0.0/8"] {
            assert_eq!(
                wrong.parse::<Cidr>().expect_err("no net").to_string(),
                format!("invalid CIDR address: {wrong}")
            );
        }
    }

    #[test]
    fn nets_are_compared() {
        assert!(net("10.0.0.0/8").overlaps(net("10.1.0.0/16")) && net("10.1.0.0/16").overlaps(net("10.0.0.0/8")));
        assert!(!net("10.0.0.0/16").overlaps(net("10.1.0.0/16")) && !net("0.0.0.0/0").overlaps(net("::/0")));
        assert_eq!(net("10.0.0.0/24").place(net("10.0.0.9/32").first()), Some(9));
        let two = one_of_each("10.1.0.0/24, fd00::/64,10.2.0.0/24").expect("nets");
        assert_eq!(two, [net("10.1.0.0/24"), net("fd00::/64")]);
        assert!(one_of_each("10.1.0.0/24,x").is_err());
    }

    #[test]
    fn ranges_are_joined() {
        let nets = [net("10.1.0.0/16"), net("224.0.0.0/3"), net("10.0.0.0/16"), net("10.0.5.0/24"), net("fd00::/8")];
        let formatted: Vec<String> = ranges(&nets, false).iter().map(|(a, b)| format!("{a}-{b}")).collect();
        assert_eq!(formatted, ["10.0.0.0-10.1.255.255", "224.0.0.0-255.255.255.255"]);
        assert_eq!(successor(net("255.255.255.255/32").first()), None);
    }
}
