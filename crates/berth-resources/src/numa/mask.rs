//! Set of NUMA nodes with IDs 0 to 63. Pure. Spec 06b.

use std::{cmp::Ordering, fmt};

/// Number of NUMA nodes that a mask can have.
pub const MAX_NODES: u32 = 64;

/// A set of NUMA nodes. Ordered by its numeric value; see [`NumaMask::cmp_narrower`] for the order of preference.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct NumaMask(u64);

impl NumaMask {
    /// The mask with these bits: bit n is node n.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits of the mask: bit n is node n.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Whether the mask has no node.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of nodes.
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether the mask has a node.
    pub fn contains(self, node: u32) -> bool {
        node < MAX_NODES && self.0 & (1 << node) != 0
    }

    /// Whether all nodes are in `other`.
    pub fn is_subset(self, other: Self) -> bool {
        self.0 & other.0 == self.0
    }

    /// Nodes of both masks.
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Nodes of either mask.
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Nodes in ascending order.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        (0..MAX_NODES).filter(move |node| self.contains(*node))
    }

    /// Fewer nodes first, then the smaller numeric value: the reference's "narrower than".
    pub fn cmp_narrower(self, other: Self) -> Ordering {
        self.len().cmp(&other.len()).then(self.0.cmp(&other.0))
    }
}

/// Nodes from [`MAX_NODES`] on are ignored.
impl FromIterator<u32> for NumaMask {
    fn from_iter<I: IntoIterator<Item = u32>>(nodes: I) -> Self {
        Self(nodes.into_iter().filter(|node| *node < MAX_NODES).fold(0, |bits, node| bits | 1 << node))
    }
}

/// Node IDs, separated by commas.
impl fmt::Display for NumaMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, node) in self.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            write!(f, "{node}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_sets_of_nodes() {
        let mask: NumaMask = [63, 0, 5, 64].into_iter().collect();
        assert_eq!((mask.len(), mask.to_string().as_str()), (3, "0,5,63"));
        assert!(mask.contains(63) && !mask.contains(64) && !mask.is_empty() && NumaMask::default().is_empty());
        let low = NumaMask::from_bits(0b10_0001);
        assert!(low.is_subset(mask) && !mask.is_subset(low));
        assert_eq!(mask.intersection(low), low);
        assert_eq!(low.union(NumaMask::from_bits(2)).bits(), 0b10_0011);
    }

    #[test]
    fn fewer_nodes_are_narrower_then_lower_ones() {
        let order = [0b1, 0b10, 0b100, 0b11, 0b101, 0b110, 0b111].map(NumaMask::from_bits);
        let mut sorted = order;
        sorted.reverse();
        sorted.sort_by(|a, b| a.cmp_narrower(*b));
        assert_eq!(sorted, order);
    }
}
