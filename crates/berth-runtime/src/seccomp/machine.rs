//! CPU architectures, their seccomp sections, and system call numbers. Pure.
//!
//! The tables are from the headers of Linux 6.18; the private calls of 32-bit Arm are added by hand.

use std::collections::BTreeMap;

/// Numbers from here on are private to an architecture and independent of the kernel version.
const PRIVATE: u32 = 0x1000;
/// Bit of x32 system call numbers on x86-64.
pub const X32: u32 = 0x4000_0000;
/// On x32, numbers from here on are its own variants of older calls.
const X32_OWN: u32 = 512;

/// Instruction set of the machine, with the system call ABIs that it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CpuArchitecture {
    /// x86-64, which also runs i386 and x32.
    X86_64,
    /// 64-bit Arm, which may also run 32-bit Arm.
    Aarch64,
    /// 64-bit RISC-V.
    Riscv64,
}

/// A system call ABI.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Section {
    /// 64-bit system calls of x86 processors.
    X86_64,
    /// 32-bit system calls of x86 processors.
    I386,
    /// x86-64 with 32-bit pointers: the same audit architecture with other call numbers.
    X32,
    /// 64-bit Arm.
    Aarch64,
    /// 32-bit Arm.
    Arm,
    /// 64-bit RISC-V.
    Riscv64,
}

impl CpuArchitecture {
    /// The architecture of this build; `None` where no tables exist.
    pub fn current() -> Option<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Self::X86_64),
            "aarch64" => Some(Self::Aarch64),
            "riscv64" => Some(Self::Riscv64),
            _ => None,
        }
    }

    /// Name in `includes` and `excludes` of profiles.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
            Self::Riscv64 => "riscv64",
        }
    }

    /// The native ABI first, then the others that its kernel accepts.
    pub fn sections(self) -> &'static [Section] {
        match self {
            Self::X86_64 => &[Section::X86_64, Section::I386, Section::X32],
            Self::Aarch64 => &[Section::Aarch64, Section::Arm],
            Self::Riscv64 => &[Section::Riscv64],
        }
    }
}

impl Section {
    /// Name in `architectures` of profiles.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "SCMP_ARCH_X86_64",
            Self::I386 => "SCMP_ARCH_X86",
            Self::X32 => "SCMP_ARCH_X32",
            Self::Aarch64 => "SCMP_ARCH_AARCH64",
            Self::Arm => "SCMP_ARCH_ARM",
            Self::Riscv64 => "SCMP_ARCH_RISCV64",
        }
    }

    /// `AUDIT_ARCH_*` value that the kernel passes to a filter.
    pub fn audit(self) -> u32 {
        match self {
            Self::X86_64 | Self::X32 => 0xc000_003e,
            Self::I386 => 0x4000_0003,
            Self::Aarch64 => 0xc000_00b7,
            Self::Arm => 0x4000_0028,
            Self::Riscv64 => 0xc000_00f3,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::X86_64 => include_str!("tables/x86_64.txt"),
            Self::I386 => include_str!("tables/i386.txt"),
            Self::X32 => include_str!("tables/x32.txt"),
            Self::Aarch64 => include_str!("tables/aarch64.txt"),
            Self::Arm => include_str!("tables/arm.txt"),
            Self::Riscv64 => include_str!("tables/riscv64.txt"),
        }
    }

    /// All system calls of the ABI: name to number.
    pub fn calls(self) -> BTreeMap<&'static str, u32> {
        let line = |line: &'static str| {
            let (number, name) = line.split_once(' ')?;
            Some((name, number.parse().ok()?))
        };
        self.text().lines().filter_map(line).collect()
    }

    /// The highest known number. Higher ones were added to the kernel after the table was made.
    pub fn newest(self) -> u32 {
        let (base, limit) = if self == Self::X32 { (X32, X32_OWN) } else { (0, PRIVATE) };
        let numbers = self.calls().into_values().map(|number| number & !X32);
        numbers.filter(|number| *number < limit).max().unwrap_or_default() | base
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_whole() {
        for (section, least) in [
            (Section::X86_64, 383),
            (Section::I386, 459),
            (Section::X32, 371),
            (Section::Aarch64, 325),
            (Section::Arm, 430),
            (Section::Riscv64, 326),
        ] {
            let lines = section.text().lines().count();
            assert_eq!((section.calls().len(), lines), (least, least), "{section:?}");
            assert_eq!(section.newest() & !X32, 469, "{section:?}");
        }
        assert_eq!(Section::X86_64.calls().get("execve"), Some(&59));
        assert_eq!(Section::I386.calls().get("execve"), Some(&11));
        assert_eq!(Section::X32.calls().get("execve"), Some(&(X32 | 520)));
        assert_eq!(Section::Aarch64.calls().get("execve"), Some(&221));
        assert_eq!(Section::Arm.calls().get("set_tls"), Some(&0xf0005));
        assert_eq!(Section::Riscv64.calls().get("riscv_hwprobe"), Some(&258));
    }
}
