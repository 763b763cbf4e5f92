//! What is asked of CRI for a sandbox and its containers. Pure.
