"""Object stores and HTTP servers as stores. All requests are made by a background process, the storage process."""
